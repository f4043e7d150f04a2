"""The HTML is well-formed, stands alone, and holds text as it is."""

import base64
import xml.etree.ElementTree as ElementTree

from attnorm.lengthbench.document import Heading, Image, Table, Text, as_html, as_markdown

BLOCKS = [
    Heading("a < b & c", 1),
    Text("“1 < 2”"),
    Table(["", "x|y"], [["p=∞", '"<td>"']]),
    Image("figures/a.svg", b"<svg/>", "a & b"),
]


def test_html_is_well_formed_and_escapes_what_it_holds():
    page = ElementTree.fromstring(as_html("t < u", BLOCKS))
    assert page.find("head/title").text == "t < u"
    assert page.find("body/h1").text == "a < b & c"
    assert page.find("body/p").text == "“1 < 2”"
    assert [cell.text for cell in page.find("body/table/tbody/tr")] == ["p=∞", '"<td>"']
    kind, _, data = page.find("body/figure/img").get("src").partition(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(data) == b"<svg/>"


def test_markdown_keeps_cells_apart():
    lines = as_markdown(BLOCKS).splitlines()
    assert "|  | x\\|y |" in lines and "|---|---|" in lines
    assert "![a & b](figures/a.svg)" in lines
