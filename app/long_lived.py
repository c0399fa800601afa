"""What stays for good, modules above all, is set apart from the garbage that Streamlit collects after every drawing.

To look through all of it takes 0.1 s each time, in which nothing is sent.
"""

import gc

_drawn: set[str] = set()  # pages, which load what they need when they are first drawn
_news: list[str] = []


def set_apart() -> None:
    """Set apart what a page has loaded that was new. Call before a page is drawn: Streamlit has just collected."""
    if _news:
        _news.clear()
        gc.freeze()


def drawn(page: str) -> None:
    """Note that a page has been drawn."""
    if page not in _drawn:
        _drawn.add(page)
        _news.append(page)
