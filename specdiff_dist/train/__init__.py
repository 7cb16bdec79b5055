"""Making a drafter for a verifier: its own answers, training on them, export. torch and transformers are loaded by the
modules that need them."""
