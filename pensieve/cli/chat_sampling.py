"""`/set`: the sampling values of a chat, and the source of each value.

Values come from `/set`, flags, variables and the file of `--config`. For values that are not set, the daemon
uses its defaults. `server_info` returns these defaults, and whether they come from the model's files.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pensieve.config import TALK, Resolved, settings_for
from pensieve.errors import InvalidArgument

SETTINGS = {each.name: each for each in settings_for(TALK) if each.group == "sampling"}
WIDTH = max(map(len, SETTINGS))
FROM_MODEL, FROM_DAEMON = "the model's own", "default"
TEMPERATURE_SANE_MAX = 2.0  # higher values cause a warning
TEMPERATURE, TEMPERATURE_STEP = 0.7, 0.3  # suggested if a reply repeats itself


class ChatSampling:
    """The sampling options of one chat."""

    def __init__(
        self,
        resolved: Resolved,
        defaults: Mapping[str, float] | None = None,  # the daemon's defaults; None: unknown
        from_model: bool = False,  # the defaults come from the model's files
    ) -> None:
        self._defaults = defaults or {}
        self._source = FROM_MODEL if from_model else FROM_DAEMON
        self._values = {name: getattr(resolved.settings, name) for name in SETTINGS}
        self._sources = {name: resolved.sources[name] for name in SETTINGS}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options to send with a message."""
        return {name: value for name, value in self._values.items() if value is not None}

    def set(self, name: str, text: str) -> None:
        """Run `/set NAME TEXT`. The text `default` removes the value."""
        self._check(name)
        if text == "default":
            self._values[name], self._sources[name] = None, "default"
            return
        try:
            self._values[name] = SETTINGS[name].parse(text)
        except ValueError as error:
            raise InvalidArgument("/set", f"{name} {error}, not {text!r}") from None
        self._sources[name] = "/set"

    def line(self, name: str) -> str:
        """Return a line with a setting, its value, and the source of the value."""
        self._check(name)
        value, source = self._values[name], self._sources[name]
        if value is None:
            if name == "seed":
                return f"{name:<{WIDTH}} a new one for each reply"
            default = self._defaults.get(name)
            source = FROM_DAEMON if name == "max_tokens" else self._source
            return f"{name:<{WIDTH}} " + (
                source if default is None else f"{default!s:<12} ({source})"
            )
        return (
            f"{name:<{WIDTH}} {value!s:<12} ({SETTINGS[name].flag if source == 'flag' else source})"
        )

    def lines(self) -> list[str]:
        return [self.line(name) for name in SETTINGS]

    def _check(self, name: str) -> None:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"Did you mean {near[0]}?" if near else f"The settings are {', '.join(SETTINGS)}"
            raise InvalidArgument("/set", f"unknown setting {name!r}. {hint}")

    @property
    def warning(self) -> str:
        """Return a warning if the temperature makes replies useless, otherwise an empty string."""
        temperature = self.options.get("temperature", 0)
        if temperature <= TEMPERATURE_SANE_MAX:
            return ""
        return (
            f"[temperature {temperature:g} is very high: above {TEMPERATURE_SANE_MAX:g}, most models "
            "write nonsense]"
        )

    @property
    def advice(self) -> str:
        """Return a command that makes repetitive replies less likely."""
        temperature = self.options.get("temperature", self._defaults.get("temperature"))
        higher = (
            TEMPERATURE
            if temperature is None or temperature < TEMPERATURE
            else temperature + TEMPERATURE_STEP
        )
        return f"/set temperature {higher:.3g}"
