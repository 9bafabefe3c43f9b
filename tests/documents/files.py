"""Small files of each kind, written by hand."""

import io
import zipfile

CONTAINER = '<container xmlns="x"><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
OPF = """<package xmlns="http://www.idpf.org/2007/opf"><manifest>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="ncx" href="toc.ncx" media-type="application/x-dtbncx+xml"/>
<item id="a" href="text/a%20b.xhtml" media-type="application/xhtml+xml"/>
<item id="c" href="text/c.xhtml" media-type="application/xhtml+xml"/></manifest>
<spine toc="ncx"><itemref idref="a"/><itemref idref="c"/></spine></package>"""
NAV = """<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="e"><body><nav epub:type="landmarks"><a href="x">no</a>
</nav><nav epub:type="toc"><ol><li><a href="text/a%20b.xhtml">The  Heron</a></li><li><a href="text/c.xhtml#two">The
<i>Lake</i></a></li></ol></nav></body></html>"""
NCX = """<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap><navPoint><navLabel><text>One</text></navLabel>
<content src="text/a%20b.xhtml"/><navPoint><navLabel><text>Two</text></navLabel><content src="text/c.xhtml#two"/>
</navPoint></navPoint></navMap></ncx>"""
PART = """<?xml version="1.0"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml"><head><title/>
<script src="x.js"/></head><body>%s</body></html>"""
FIRST, LAST = "A heron stands in the water.", "Caf&eacute; &amp; lake,&nbsp;caf&#233;."
PARTS = PART % f"<p>{FIRST}</p>", PART % f'<p>Before.</p><a id="two"/><p>{LAST}</p>'
_W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" xmlns:mc="m"'
_M = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
STYLES = f"""<w:styles {_W}><w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style></w:styles>"""
WORD = f"""<w:document {_W}><w:body><w:p><w:pPr><w:pStyle w:val="berschrift1"/><w:tabs><w:tab/></w:tabs></w:pPr><w:r>
<w:t>The </w:t></w:r><w:r><w:t>Lake</w:t></w:r></w:p><w:p><w:r><w:t>One</w:t><w:tab/><w:t>two</w:t><w:br/>
<w:t>three</w:t><w:delText>gone</w:delText></w:r></w:p><mc:AlternateContent><mc:Fallback><w:p><w:r>
<w:t>twice</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent><w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc><w:tc>
<w:p><w:r><w:t>c</w:t></w:r></w:p></w:tc></w:tr></w:tbl></w:body></w:document>"""
NOTES = f"<w:footnotes {_W}><w:footnote><w:p><w:r><w:t>A note.</w:t></w:r></w:p></w:footnote></w:footnotes>"
HTML = f"""<!DOCTYPE html><html><head><title>No</title><style>p {{}}</style></head><body><nav>menu</nav><h1>The
<b>Heron</b> </h1><p>{FIRST}<br>It
waits.</p><script>var x = "<p>";</script><pre>a  b
c</pre><table><tr><td>x<td>y</table><h2>End</h2>{LAST}</body></html>"""


def marked(paragraph):
    """A DOCX file with a paragraph, a footnote, an endnote, and a style that hides."""
    hides = '<w:style w:styleId="Hidden"><w:rPr><w:vanish/></w:rPr></w:style>'
    parts = {"document": f"<w:document {_W} {_M}><w:body><w:p>{paragraph}</w:p></w:body></w:document>"}
    parts |= {"styles": f"<w:styles {_W}>{hides}</w:styles>"}
    for kind, id, text in (("footnote", 2, "On Monday."), ("endnote", 5, "On Tuesday.")):
        note = f"<w:p><w:r><w:{kind}Ref/></w:r><w:r><w:t> {text}</w:t></w:r></w:p>"
        note = f'<w:{kind} w:id="{id}">{note}</w:{kind}>' if f"{kind}Reference" in paragraph else ""
        parts[f"{kind}s"] = f"<w:{kind}s {_W}>{note}</w:{kind}s>"
    return docx(**{f"word__{name}_xml": part for name, part in parts.items()})


def zipped(files, **changed):
    """A zip file. changed: content of files by their names, with __ for / and _ for ."""
    files = {**files, **{name.replace("__", "/").replace("_", "."): content for name, content in changed.items()}}
    with zipfile.ZipFile(written := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            if content is not None:
                file.writestr(name, content)
    return written.getvalue()


def epub(**changed):
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "OEBPS/book.opf": OPF}
    files |= {"OEBPS/nav.xhtml": NAV, "OEBPS/toc.ncx": NCX, "OEBPS/text/a b.xhtml": PARTS[0]}
    return zipped({**files, "OEBPS/text/c.xhtml": PARTS[1]}, **changed)


def docx(**changed):
    files = {"[Content_Types].xml": "<Types/>", "word/styles.xml": STYLES, "word/document.xml": WORD}
    return zipped({**files, "word/footnotes.xml": NOTES}, **changed)


def pdf(*pages, trailer="", others=()):
    """A PDF with a line of text on each page, before which ▣ stands for a picture that fills it. others: objects, of
    which the first has the number 4 + 2 len(pages).
    """
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>"]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for number, text in enumerate(pages):
        shown = f"BT /F1 12 Tf 72 700 Td ({text.removeprefix('▣')}) Tj ET" if text else ""
        shown = f"q 612 0 0 792 0 0 cm BI /W 1 /H 1 /CS /G /BPC 8 ID a EI Q {shown}" if text.startswith("▣") else shown
        resources = "/Resources << /Font << /F1 3 0 R >> >> /MediaBox [0 0 612 792]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {resources} /Contents {5 + 2 * number} 0 R >>")
        objects.append(f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream")
    content, places = b"%PDF-1.4\n", []
    for number, each in enumerate([*objects, *others], 1):
        places.append(len(content))
        content += f"{number} 0 obj\n".encode() + (each if isinstance(each, bytes) else each.encode()) + b"\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(places) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R {trailer} >>"
    return content + f"{end}\nstartxref\n{len(content)}\n%%EOF\n".encode()


LOCKED = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{'5a' * 32}> /U <{'a5' * 32}> /P -4 >> /ID [<00> <00>]"
EACH = {  # a file of each kind, by its suffix
    "pdf": pdf("A heron stands.", "It waits."),
    "epub": epub(),
    "docx": docx(),
    "html": HTML.encode(),
    "txt": "Käse und Brot, für später. Größe zählt nicht.\n".encode("cp1252") * 40,
    "md": "# Ein Käse\n\nBrot — und „mehr“.\n".encode() * 40,
}
