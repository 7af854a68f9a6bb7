"""`/set`: how replies are sampled, what is in force and where that comes from.

What is set within a talk lasts until the program ends; flags, variables and the file of `--config` say what
it begins with.  What nobody has set is the model's own: its files say it, and the daemon tells.  Many
models name nothing.  The daemon then answers greedily, so that the same message has the same reply, and so
does `chat -q`; but a small model that talks greedily soon says the same over and over.  So a talk has
values of its own for such a model, those of llama.cpp's server (docs/operating.md, Sampling).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pensieve.config import TALK, Resolved, settings_for
from pensieve.errors import InvalidArgument

SETTINGS = {each.name: each for each in settings_for(TALK) if each.group == "sampling"}
WIDTH = max(map(len, SETTINGS))
UNSET = {
    "max_tokens": "1024, the daemon's default",
    "seed": "another one for each reply",
}
OF_THE_MODEL = "the model's own"
OF_CHAT = "chat's, as the model names none"
FOR_A_TALK: Mapping[str, float] = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05, "top_k": 40}
TEMPERATURE_SANE_MAX = 2.0  # a higher one is allowed, with a warning
TEMPERATURE, TEMPERATURE_STEP = 0.7, 0.3  # advice against a reply that repeats itself


class ChatSampling:
    """The sampling options of one talk."""

    def __init__(
        self,
        resolved: Resolved,
        of_the_model: Mapping[str, float] | None = None,  # None: not known
        is_talk: bool = True,
    ) -> None:
        self._of_the_model = of_the_model or {}
        self._of_chat = FOR_A_TALK if is_talk and of_the_model == {} else {}
        self._values = {name: getattr(resolved.settings, name) for name in SETTINGS}
        self._sources = {name: resolved.sources[name] for name in SETTINGS}

    @property
    def options(self) -> dict[str, Any]:
        """What is sent with a message."""
        given = {name: value for name, value in self._values.items() if value is not None}
        return {**self._of_chat, **given}

    def set(self, name: str, text: str) -> None:
        """From `/set NAME TEXT`; the text `default` forgets what was set."""
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
        """One setting, its value, and where it comes from."""
        self._check(name)
        value, source = self._values[name], self._sources[name]
        if value is None:
            for value, source in (
                (self._of_chat.get(name), OF_CHAT),
                (self._of_the_model.get(name), OF_THE_MODEL),
            ):
                if value is not None:
                    return f"{name:<{WIDTH}} {value!s:<12} ({source})"
            return f"{name:<{WIDTH}} {UNSET.get(name, OF_THE_MODEL)}"
        return (
            f"{name:<{WIDTH}} {value!s:<12} ({SETTINGS[name].flag if source == 'flag' else source})"
        )

    def lines(self) -> list[str]:
        return [self.line(name) for name in SETTINGS]

    def _check(self, name: str) -> None:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            meant = f"Did you mean {near[0]}?" if near else f"It knows {', '.join(SETTINGS)}"
            raise InvalidArgument("/set", f"unknown setting {name!r}. {meant}")

    @property
    def warning(self) -> str:
        """A warning about a temperature that makes replies useless; empty if there is none."""
        temperature = self.options.get("temperature", 0)
        if temperature <= TEMPERATURE_SANE_MAX:
            return ""
        return (
            f"[temperature {temperature:g} is very high: above {TEMPERATURE_SANE_MAX:g}, most models "
            "write nonsense]"
        )

    @property
    def advice(self) -> str:
        """The command that makes it rarer that a reply repeats itself."""
        now = self.options.get("temperature", self._of_the_model.get("temperature"))
        hotter = TEMPERATURE if now is None or now < TEMPERATURE else now + TEMPERATURE_STEP
        return f"/set temperature {hotter:.3g}"
