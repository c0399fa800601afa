"""The page is drawn again when the browser changes between light and dark: figures take their colours from here."""

import streamlit as st

# Streamlit calls this again whenever its theme changes. Told once a change: a theme that the server does not come to
# see, whatever the reason, must not draw the page without end.
_JS = """
export default function({ parentElement, data, setStateValue }) {
  const shown = getComputedStyle(document.querySelector("[data-testid=stApp]")).colorScheme;
  const told = parentElement.routescopeTheme ?? data.drawn;
  parentElement.routescopeTheme = shown;
  if (shown !== told && shown !== data.drawn && ["light", "dark"].includes(shown)) setStateValue("shown", shown);
}
"""


def watch(drawn: str) -> None:
    """Have the page drawn again once the browser shows another theme than `drawn`, "light" or "dark"."""
    # Registered at each call: Streamlit forgets nothing, but another server in this process would know nothing of it.
    mount = st.components.v2.component("routescope_theme_change", html="", js=_JS)
    mount(key="theme_change", data={"drawn": drawn}, on_shown_change=lambda: None)
