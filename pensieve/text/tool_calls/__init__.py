class CallStyle: ...


def style_of(template):
    return None
