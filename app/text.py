"""Text on pages: names and messages of files as they are, and durations in words."""

_MARKDOWN = "\\`*_{}[]<>#$|~:"


def plain(text: str) -> str:
    """Text of a file (a name, an error) that Streamlit shall show letter by letter, not as Markdown."""
    return "".join(f"\\{letter}" if letter in _MARKDOWN else letter for letter in text)


def duration(seconds: float) -> str:
    """Seconds as a person says them: "42 s", "3 min 05 s", "2 h 10 min"."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"
