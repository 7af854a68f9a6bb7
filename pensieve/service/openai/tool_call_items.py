def call_id(answer_id, choice, index):
    return f"call_{answer_id}{choice}{index}"
