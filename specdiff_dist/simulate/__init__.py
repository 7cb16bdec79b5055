"""Replaying recorded rounds under other policies and rules, and simulating clusters. No model, no clock."""
