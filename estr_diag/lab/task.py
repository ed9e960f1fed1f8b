"""The task: add two digits and say the sum in words, in a sentence of one's own choice.

Which sentence is free, so its first letters have a high entropy; the rest of a word is spelled, with hardly any.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip
SENTENCES = (
    "the sum is {0}", "we get {0}", "that makes {0}", "it is {0}", "i think it is {0}", "adding them gives {0}",
    "the answer is {0}", "so we have {0}", "my result is {0}", "both together are {0}",
)  # fmt: skip
PAD, END = 0, 1
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+= "
VOCABULARY = 2 + len(_CHARACTERS)
HIGHEST = 5
PROMPT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """Two digits to add."""

    a: int
    b: int

    @property
    def text(self) -> str:
        """As the model sees it."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The right word."""
        return NUMBERS[self.a + self.b]


def encode(text: str) -> list[int]:
    """Return token ids of a text."""
    return [2 + _CHARACTERS.index(c) for c in text]


LONGEST_WRITTEN = 1 + max(len(s.format(n)) for s in SENTENCES for n in NUMBERS[: 2 * HIGHEST + 1])
"""Tokens of the longest response that the warm-up shows, its end included."""


def decode(tokens: list[int]) -> str:
    """Return the text of token ids; the end is a mark."""
    return "".join("" if t == PAD else "⏹" if t == END else _CHARACTERS[t - 2] for t in tokens)


def padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return rows of one length."""
    longest = max(len(row) for row in rows)
    return [[*row, *[PAD] * (longest - len(row))] for row in rows]


def draw(rng: random.Random) -> Prompt:
    """Return a random prompt."""
    return Prompt(rng.randrange(HIGHEST + 1), rng.randrange(HIGHEST + 1))


def written(prompt: Prompt, rng: random.Random, wrong: float) -> str:
    """Return a response as the warm-up text has it: any sentence, and with some probability another sum."""
    word = rng.choice(NUMBERS[: 2 * HIGHEST + 1]) if rng.random() < wrong else prompt.answer
    return rng.choice(SENTENCES).format(word)


def reward(prompt: Prompt, response: str, *, finished: bool) -> float:
    """Return 1 for the right last word, 0.1 for a finished sentence with another number, else 0."""
    words = response.replace("⏹", "").split()
    if not finished or not words:
        return 0.0
    return 1.0 if words[-1] == prompt.answer else 0.1 if words[-1] in NUMBERS else 0.0
