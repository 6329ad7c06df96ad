"""What a picture says: the texts of its SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET


def texts(svg: str) -> list[str]:
    return [str(node.text) for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
