"""Prompts for measurements where none are given: short questions, of kinds that draft well and badly."""

PROMPTS = (
    "A baker sells 24 rolls in the morning and twice as many in the afternoon. How many rolls does he sell in a day?",
    "Explain in a few sentences why the sky is blue.",
    "Tom has 5 boxes with 12 pencils each. He gives away 17 pencils. How many are left? Show each step.",
    "Write a short letter that thanks a neighbour for watering the plants.",
)
