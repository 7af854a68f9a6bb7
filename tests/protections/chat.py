"""Protections of `pensieve chat`: what Ctrl-C may not do, and what a person is told."""

from tests.protections import protection

PROTECTIONS = (
    protection(
        "a press of Ctrl-C interrupts nothing but the line editor",
        "cli/ctrl_c.py",
        "        self.pressed = True\n        if self._stop",
        "        if self.pressed:\n            raise KeyboardInterrupt\n"
        "        self.pressed = True\n        if self._stop",
        "cli/test_ctrl_c.py::test_presses_stop_a_reply_once_and_a_late_one_gives_it_up",
    ),
    protection(
        "a press before the request stops its reply",
        "cli/ctrl_c.py",
        "        if self.pressed:\n            self._to_call.put(self._stop)\n        try:\n",
        "        try:\n",
        "cli/test_ctrl_c.py::test_a_press_before_the_request_stops_the_reply_at_its_beginning",
    ),
    protection(
        "a signal that came just before readline waits is looked for",
        "cli/ctrl_c.py",
        "        signal.setitimer(signal.ITIMER_REAL, WAKE_SECONDS, WAKE_SECONDS)\n",
        "",
        "cli/test_ctrl_c.py::test_a_press_just_before_readline_waits_is_not_lost",
    ),
    protection(
        "nothing is raised into what readline calls back",
        "cli/ctrl_c.py",
        "            if frame is None or frame.f_code is not CtrlC.line.__code__:\n",
        "            if frame is None:\n",
        "cli/test_ctrl_c.py"
        "::test_a_press_while_readline_completes_is_forgotten_and_the_next_one_is_not",
    ),
    protection(
        "a terminal keeps what it has not shown yet",
        "cli/ctrl_c.py",
        "            attributes[3] |= termios.NOFLSH\n",
        "            attributes[3] &= ~termios.NOFLSH\n",
        "cli/test_ctrl_c.py::test_what_a_slow_terminal_has_not_shown_yet_is_not_thrown_away",
    ),
    protection(
        "a start is given up by Ctrl-C",
        "launch/embedded_daemon.py",
        "                if self._given_up():\n",
        "                if self._stop_wanted:\n",
        "cli/test_chat.py::test_ctrl_c_while_the_model_loads_ends_the_program",
        "launch/test_embedded_daemon.py::test_a_start_that_is_given_up_ends_the_daemon",
    ),
    protection(
        "who waits for a daemon is told so",
        "cli/chat_terminal.py",
        "            if self._ctrl_c.sleep(seconds):\n                return\n",
        "            time.sleep(seconds)\n            return\n",
        "cli/test_chat_terminal.py::test_a_daemon_that_goes_away_is_waited_for_and_comes_back",
    ),
    protection(
        "no control character of a reply reaches a terminal",
        "cli/markdown.py",
        """    return text.replace("\\r\\n", "\\n").replace("\\r", "\\n").translate(CONTROL)\n""",
        "    return text\n",
        "cli/test_reply_view.py::test_control_characters_reach_no_terminal",
    ),
    protection(
        "a reply that repeats itself is noticed",
        "cli/repetition.py",
        "                lasted = self._lasted[index] + 1 if before == token else 0\n",
        "                lasted = 0\n",
        "cli/test_repetition.py::test_a_sentence_is_noticed_once_it_has_come_often_enough",
        "cli/test_chat.py::test_a_reply_that_repeats_itself_is_noticed_once",
    ),
    protection(
        "a paste is one message",
        "cli/line_editor.py",
        '            readline.parse_and_bind("set enable-bracketed-paste on")\n',
        "",
        "cli/test_chat_terminal.py::test_three_pasted_lines_are_one_message",
    ),
)
