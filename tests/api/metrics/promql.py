"""Find the metrics and labels in a PromQL expression. Supports only the grammar of our own expressions."""

from __future__ import annotations

import re
from typing import NamedTuple

KEYWORDS = {"and", "or", "unless", "on", "ignoring", "by", "without", "bool", "offset"}
AGGREGATES = {"sum", "min", "max", "avg", "count"}
FUNCTIONS = {"rate", "increase", "deriv", "histogram_quantile", "absent", "label_values"}
LABEL_LISTS = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")


class Named(NamedTuple):
    metrics: frozenset[str]
    labels: frozenset[str]


def names_in(expression: str) -> Named:
    labels: set[str] = set()
    for found in LABEL_LISTS.findall(expression):
        labels |= {each.strip() for each in found.split(",")}
    text = LABEL_LISTS.sub(" ", expression)
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    for matchers in re.findall(r"\{([^}]*)\}", text):
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    if found := re.fullmatch(r"label_values\(\s*(\S+)\s*,\s*(\w+)\s*\)", text):
        return Named(frozenset({found[1]}), frozenset({found[2]}))
    metrics = set()
    for match in re.finditer(r"[A-Za-z_:][\w:]*(\s*\()?", text):
        word = match[0].rstrip("( \n")
        if match[1]:
            assert word in AGGREGATES | FUNCTIONS, f"{word} in {expression}"
        elif word not in KEYWORDS and not re.fullmatch(r"\d.*", word):
            metrics.add(word)
    return Named(frozenset(metrics), frozenset(labels))
