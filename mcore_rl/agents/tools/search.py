"""The tool `search`: BM25 over a local file of texts."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np

from mcore_rl.agents.tools.base import tool
from mcore_rl.config.errors import ConfigError

_WORD = re.compile(r"\w+")
_MAX_RESULTS = 20


class SearchTool:
    """An index of a JSONL file: a text a line in the field `text`, and maybe a `title`.

    Score of a text d for a query (Robertson and Zaragoza 2009, eq. 3.15, with the idf of Lucene,
    which is never negative): the sum over the words w of the query of
    ln(1 + (N - df + 0.5) / (df + 0.5)) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / mean |d|)).
    Words are those of Python's re, in lower case. It is only read, so trajectories can share it.
    """

    def __init__(self, path: str | Path, k1: float = 1.2, b: float = 0.75) -> None:
        """Raises ConfigError naming the line that cannot be read."""
        self._rows = _rows(Path(path))
        words = [_words(" ".join(row)) for row in self._rows]
        lengths = np.array([len(one) for one in words], dtype=np.float64)
        self._norms = k1 * (1 - b + b * lengths / max(lengths.mean(), 1.0))
        postings: dict[str, list[tuple[int, int]]] = {}
        for number, one in enumerate(words):
            for word, count in Counter(one).items():
                postings.setdefault(word, []).append((number, count))
        self._postings = {word: np.array(found).T for word, found in postings.items()}
        self._k1 = k1

    def scores(self, query: str) -> np.ndarray:
        """Of all texts, float64[number of texts]."""
        found = np.zeros(len(self._rows))
        for word in _words(query):
            if word in self._postings:
                numbers, counts = self._postings[word]
                idf = math.log(1 + (len(found) - len(numbers) + 0.5) / (len(numbers) + 0.5))
                weights = counts * (self._k1 + 1) / (counts + self._norms[numbers])
                found[numbers] += idf * weights
        return found

    @tool
    def search(self, query: str, top_k: int = 3) -> str:
        """Searches a collection of texts, and returns those that fit best.

        Args:
            query: words to look for
            top_k: how many texts, 1 to 20
        """
        scores = self.scores(query)
        best = np.argsort(-scores, kind="stable")[: min(max(top_k, 1), _MAX_RESULTS)]
        found = [self._rows[number] for number in best if scores[number] > 0]
        if not found:
            return "Nothing was found."
        texts = [f"{title}\n{text}" if title else text for title, text in found]
        return "\n\n".join(f"[{place}] {text}" for place, text in enumerate(texts, 1))


def _rows(path: Path) -> list[tuple[str, str]]:
    """Titles and texts."""
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise ConfigError(f"{path}:{number}: allowed: an object with text as `text`")
                rows.append((str(row.get("title", "")), row["text"]))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{len(rows) + 1} is no JSON: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{path} is empty; allowed: at least one text")
    return rows


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
