"""The dashboard: navigation and run picker, nothing else. Start it with `streamlit run app/main.py`."""

from pathlib import Path

import streamlit as st

from app import charts, long_lived, navigation, pickers, record_form, sidebar, state, theme_change
from app.text import plain
from recorder.storage import StorageError

st.set_page_config(
    page_title="routescope",
    page_icon=str(Path(__file__).with_name("icon.svg")),
    layout="wide",
)
st.html(Path(__file__).with_name("style.css"))
pages = navigation.pages()
page = st.navigation(pages, position="hidden")
name = navigation.name_of(page)
long_lived.set_apart()
state.begin(name)
with st.sidebar:
    menu = st.container(gap="xxsmall")
    pickers.pick_run()
    sidebar.recordings(name)
    record_form.render()
    with menu:
        navigation.links(pages, page)
if name in navigation.OF_ONE_RUN:
    pickers.say_missing()
try:
    page.run()
except StorageError as error:  # between the look at the run and the reading of its rows
    st.error(plain(str(error)), icon=":material/cloud_off:")
theme_change.watch(charts.theme())
state.finish()
long_lived.drawn(name)
