"""PNG and SVG of a chart, made by the plotly.js that has drawn it: no package and no browser on the server's side."""

import streamlit as st

from app.figures.theme import Theme, palette

_HTML = (
    '<div class="row"><button type="button" data-format="png">PNG</button>'
    '<button type="button" data-format="svg">SVG</button></div><div class="said" role="status"></div>'
)
_CSS = """
.row { display: flex; gap: 0.5rem; }
button { font: inherit; font-size: 0.875rem; color: var(--st-text-color); background: var(--st-background-color);
  border: 1px solid var(--st-border-color); border-radius: var(--st-button-radius, 0.35rem); padding: 0.25rem 0.75rem;
  min-height: 2.5rem; cursor: pointer; flex: 1; }
button:hover { color: var(--st-primary-color); border-color: var(--st-primary-color); }
button:focus-visible { outline: 2px solid var(--st-primary-color); outline-offset: 1px; }
.said { font-size: 0.85rem; }
"""
# The figure's own ground is transparent: an image of white text on nothing could not be read on a white page. An image
# cannot use the fonts that a page brings along: measure and draw with those that the machine has, and give the title,
# whose lines are broken for the narrower font of the page, the width that it then takes.
_JS = r"""
export default function({ parentElement, data }) {
  const said = parentElement.querySelector(".said");
  const save = async (format) => {
    const place = ".st-key-" + data.chart.replace(/[^a-zA-Z0-9_-]/g, "-");
    const chart = document.querySelector(place + " .js-plotly-plot");
    if (!chart || !window.Plotly) { said.textContent = "No chart to save here; HTML works."; return; }
    const fonts = JSON.stringify(chart.layout).replaceAll(/\\"Source Sans[^"\\]*\\", /g, "");
    const layout = { ...JSON.parse(fonts), paper_bgcolor: data.ground, autosize: false };
    const pen = document.createElement("canvas").getContext("2d");
    const shared = layout.template?.layout?.title?.font;
    const font = { size: 18, family: "sans-serif", ...shared, ...layout.title?.font };
    pen.font = `bold ${font.size}px ${font.family}`;
    const title = (layout.title?.text ?? "").split("<br><span")[0];
    const lines = title.split("<br>").map((line) => line.replace(/<[^>]*>/g, ""));
    const width = Math.ceil(Math.max(chart.offsetWidth, ...lines.map((line) => pen.measureText(line).width + 32)));
    const height = chart.offsetHeight;
    Object.assign(layout, { width, height });
    const asked = { format, width, height, scale: format === "png" ? 2 : 1, imageDataOnly: format === "svg" };
    const image = await window.Plotly.toImage({ data: chart.data, layout }, asked);
    let blob;
    if (format === "svg") {
      const page = new DOMParser().parseFromString(image, "image/svg+xml");
      const name = page.createElementNS("http://www.w3.org/2000/svg", "title");
      name.textContent = data.alt;
      page.documentElement.prepend(name);
      page.documentElement.setAttribute("role", "img");
      blob = new Blob([new XMLSerializer().serializeToString(page)], { type: "image/svg+xml" });
    } else {
      blob = new Blob([Uint8Array.from(atob(image.split(",")[1]), (letter) => letter.charCodeAt(0))]);
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = data.name + "." + format;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    said.textContent = "";
  };
  for (const button of parentElement.querySelectorAll("button")) {
    button.onclick = () => save(button.dataset.format).catch((error) => { said.textContent = String(error); });
  }
}
"""


def page_ground(theme: Theme) -> str:
    """The colour of the dashboard's page, behind the figures."""
    return str(st.get_option(f"theme.{theme}.backgroundColor") or palette(theme).ground)


def buttons(*, chart: str, name: str, alt: str, theme: Theme, key: str) -> None:
    """Draw the buttons that save a chart of this page, as it is shown now, as PNG or SVG.

    chart: the chart's key. name: of the file, without its ending. alt: what it shows, the title inside the SVG.
    """
    # Registered at each call: Streamlit forgets nothing, but another server in this process would know nothing of it.
    mount = st.components.v2.component("routescope_save_image", html=_HTML, css=_CSS, js=_JS)
    mount(key=key, data={"chart": chart, "name": name, "alt": alt, "ground": page_ground(theme)})
