"""A page as a browser would see it."""

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, scripts, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts[dict(attrs).get("id") or ""] = ""

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[list(self.scripts)[-1]] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data
