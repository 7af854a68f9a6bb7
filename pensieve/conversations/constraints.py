"""Compile a constraint before its turn begins, to refuse a request that cannot work. Thread-safe.

The engine process compiles the constraint again before the turn starts (turns_awaiting_constraints.py in
`engine`). Checks run in the text pool and take a bounded time: core/constraint.py bounds the text, and
text/grammars.py bounds the work of compiling it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from pensieve.core.constraint import Constraint
from pensieve.core.turn import TurnOptions
from pensieve.errors import ConfigError, InvalidArgument, one_line
from pensieve.text.grammars import GrammarError, Grammars, Vocabulary

KNOWN_MAX = 1024
FIELD = "constraint"


class ConstraintChecker:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._grammars = Grammars(vocabulary)
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()  # kinds and digests
        self._lock = threading.Lock()

    def knows(self, options: TurnOptions) -> bool:
        """Whether `check` returns at once: there is no constraint, or it was checked before."""
        constraint = options.constraint
        return constraint is None or (constraint.kind.value, constraint.digest) in self._known

    def check(self, options: TurnOptions) -> None:
        """Raise InvalidArgument if the constraint cannot be enforced together with the other options."""
        constraint = options.constraint
        if constraint is None:
            return
        if options.sampling.ignore_eos:
            raise InvalidArgument(
                "sampling.ignore_eos",
                "cannot be combined with a constraint, which decides where the reply ends",
            )
        if self.knows(options):
            return
        if (problem := self._problem(constraint)) is not None:
            raise InvalidArgument(f"{FIELD}.{constraint.kind.value}", problem)
        with self._lock:
            self._known[constraint.kind.value, constraint.digest] = None
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def _problem(self, constraint: Constraint) -> str | None:
        if (problem := constraint.problem()) is not None:
            return problem
        try:
            self._grammars.compile(constraint.kind.value, constraint.text)
        except GrammarError as error:
            return f"cannot be compiled: {error}"
        except ConfigError as error:
            return f"is not supported by this server: {one_line(error)}"
        return None
