"""PDF by PDFium, in a process of its own, whose program this file is. PDFium is C++ that meets a stranger's file: a
crash, a loop or a bomb ends that process alone. And PDFium serves one thread at a time.
"""

import json
import subprocess
import sys
from typing import Any, NamedTuple

SECONDS, BYTES = 120, 4 << 30  # most that a file may take of the processor, and of memory
PASSWORD, SUCCESS = 4, 0  # PDFium's numbers for a file that needs one, and for one without pages
FEW = 60  # characters of a stamp, a page number or a caption: on a page that is a picture these are no text
COVERED = 0.5  # of a page, that its pictures have together
DRAWN = 300  # paths, in which letters may be drawn


class Page(NamedTuple):
    """What a page has. is_picture: hardly any text, but a picture, or drawings. is_blank: nothing."""

    text: str
    is_picture: bool = False
    is_blank: bool = False


def pages(content: bytes, most: int) -> list[Page]:
    """The pages. most: characters of all. Raises ValueError that says what is wrong with the file."""
    command = [sys.executable, "-P", __file__, str(most)]  # -P: modules beside this one are not found
    done = subprocess.run(command, input=content, capture_output=True)
    if done.returncode:
        raise ValueError("is damaged, or too large: PDFium cannot read it")
    said = json.loads(done.stdout)
    if isinstance(said, str):
        raise ValueError(said)
    return [Page(*each) for each in said]


def _read(content: bytes, most: int) -> list[Page] | str:
    """The pages, or what is wrong."""
    import pypdfium2

    try:
        file = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        said = {PASSWORD: "is encrypted: save a copy that needs no password", SUCCESS: "has no pages"}
        return said.get(getattr(error, "err_code", -1), "is damaged: PDFium cannot read it")
    found, characters = list[Page](), 0
    for number in range(len(file)):
        try:
            page = file[number]
            text = page.get_textpage().get_text_range()
            found.append(_page(page, text) if len(text.strip()) < FEW else Page(text))
        except pypdfium2.PdfiumError:
            return f"is damaged: PDFium cannot read page {number + 1}"
        page.close()
        characters += len(text) + 1
        if characters > most:
            return f"has more than {most:,} characters"
    return found


def _page(page: Any, text: str) -> Page:
    """A page with hardly any text."""
    from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE, FPDF_PAGEOBJ_PATH

    covered, paths, objects, area = 0.0, 0, 0, max(1.0, page.get_width() * page.get_height())
    for each in page.get_objects():
        objects += 1
        paths += each.type == FPDF_PAGEOBJ_PATH
        if each.type == FPDF_PAGEOBJ_IMAGE:
            left, bottom, right, top = each.get_bounds()
            # The places of what is within another object are not those on the page.
            covered += 1.0 if each.level else abs((right - left) * (top - bottom)) / area
    return Page(text, covered >= COVERED or paths >= DRAWN, not objects)


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(_read(sys.stdin.buffer.read(), int(sys.argv[1]))))
