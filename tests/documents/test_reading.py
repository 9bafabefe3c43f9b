"""Files as people have them: their text and places, and, for those that cannot be read, one line that says why."""

import random
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pypdfium2", reason="the optional extra `documents` is not installed")
pytest.importorskip("chardet", reason="the optional extra `documents` is not installed")
pytest.importorskip("lxml", reason="the optional extra `documents` is not installed")

from landmark.documents import (
    Document,
    EncodingError,
    beside_memory,
    concatenated,
    document_of,
    read_document,
    saved_document,
)
from landmark.documents import pdf as pdf_program
from landmark.experiment.data.sources import open_source
from landmark.utils.errors import UserError
from tests.documents import files
from tests.experiment.data.conftest import SHARED

TAIL = "Café & lake, café."


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """There is no network, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "socket", None)
    yield
    assert not list(tmp_path.iterdir())


def places(document):
    """The text that begins at each place, up to a line's end."""
    return {label: document.text[start:].lstrip().splitlines()[0] for start, label in document.places}


@pytest.mark.parametrize(
    ("content", "text", "found"),
    [
        (
            files.pdf("A heron.", "", "It waits."),
            "A heron.\n\nIt waits.\n\n",
            {"page 1": "A heron.", "page 3": "It waits."},
        ),
        (files.epub(), f"{files.FIRST}\n\nBefore.\n\n{TAIL}\n\n", {"“The Heron”": files.FIRST, "“The Lake”": TAIL}),
        (
            files.epub(OEBPS__nav_xhtml=None),
            f"{files.FIRST}\n\nBefore.\n\n{TAIL}\n\n",
            {"“One”": files.FIRST, "“Two”": TAIL},
        ),
        (
            files.epub(
                OEBPS__nav_xhtml=None, OEBPS__toc_ncx="<ncx/>", OEBPS__text__c_xhtml=files.PART % "<h2>A <i>b</i></h2>c"
            ),
            f"{files.FIRST}\n\nA b\n\nc\n\n",
            {"“A b”": "A b"},
        ),
        (
            files.docx(),
            "The Lake\n\nOne\ttwo\nthree\n\na b \tc\n\nA note.",
            {"“The Lake”": "The Lake"},
        ),
        (
            files.HTML.encode(),
            f"The Heron\n\n{files.FIRST}\nIt waits.\n\na  b\nc\n\nx\ty\n\nEnd\n\n{TAIL}",
            {"“The Heron”": "The Heron", "“End”": "End"},
        ),
        (b"# A\r\n\r\nb\rc\n", "# A\n\nb\nc\n", {"line": "# A"}),
    ],
    ids=["pdf", "epub", "epub-2", "epub without contents", "docx", "html", "text"],
)
def test_a_text_and_its_places(content, text, found):
    document = document_of(content, "book")
    assert document.text == text
    assert places(document) == found


LINE = "The rent is due on the first day of each month, and is paid to the landlord."
PICTURES = "but pictures: ocrmypdf adds the text of scans"
LACKING = [
    ([LINE, "▣", LINE, "▣", "▣", "▣", LINE, "", LINE], [f"pages 2 and 4–6 have no text, {PICTURES}"]),
    (["▣", LINE, "4"], [f"page 1 has no text, {PICTURES}"]),
    ([LINE, f"▣{LINE}", "▣Bates 1"], [f"page 3 has hardly any text, {PICTURES}"]),
    ([LINE, "\\001\\002\\003 \\004"], ["page 2 has letters that cannot be read: the file does not say which they are"]),
    ([LINE, "Page 2", ""], []),
    (["▣", LINE] * 10, [f"pages 1, 3, 5, 7, 9, 11, 13, 15 and 2 more have no text, {PICTURES}"]),
]  # fmt: skip


@pytest.mark.parametrize(("pages", "lacks"), LACKING)
def test_pages_without_text_are_named_and_a_blank_one_is_no_scan(pages, lacks, caplog):
    document = document_of(files.pdf(*pages), "lease.pdf")
    assert document.lacks == tuple(f"lease.pdf: {each}" for each in lacks)
    assert caplog.messages == [*document.lacks]
    both = concatenated([document, Document("b.txt", "Text.")])
    assert (both.lacks, both.parts()[0][1].text) == (document.lacks, document.text.rstrip())
    assert [document.place(document.text.index(each)) for each in ("The rent",)] == [f"page {1 + pages.index(LINE)}"]


MARKS = (Path(__file__).parents[2] / "docs" / "marks.md").read_text("utf-8").split("\n## ")[1:]
ROWS = [
    (section.split("\n")[0], *row.groups())
    for section in MARKS
    for row in re.finditer(r"^\| (.*?) \| `(.*?)` \| `(.*?)` \|$", section, re.MULTILINE)
]


@pytest.mark.parametrize(("kind", "mark", "given", "expected"), ROWS, ids=[f"{row[0]}, {row[1]}" for row in ROWS])
def test_each_mark_becomes_what_the_page_says(kind, mark, given, expected):
    if kind == "PDF":
        content = files.pdf(given.replace("&shy;", "\\255").replace("↵", ") Tj 0 -14 Td (")).replace(
            b"/Helvetica", b"/Helvetica /Encoding << /Differences [173 /sfthyphen] >>"
        )
    else:
        content = files.marked(given) if kind == "DOCX" else f"<html><body><p>{given}</p></body></html>".encode()
    assert " ".join(document_of(content, "a").text.split()) == expected


def test_the_page_of_marks_has_three_tables():
    assert Counter(kind for kind, *_ in ROWS) == {"HTML and EPUB": 18, "DOCX": 16, "PDF": 3}


def test_a_word_that_a_pdf_divides_is_whole_if_it_stands_elsewhere(monkeypatch):
    pages = ["The captain, a well\ufffeknown cap\ufffetain.\r\nHe sat.", " "]
    monkeypatch.setattr(pdf_program, "pages", lambda content, most: [pdf_program.Page(each) for each in pages])
    assert document_of(b"%PDF-1.7", "a").text == "The captain, a well-known captain.\nHe sat.\n\n"


SAID = {
    "de": "Größe und Übermut: die Mädchen aßen süße Äpfel, während der König müßig träumte.",
    "fr": "Après déjeuner, l'élève était fâché à cause de la leçon où l'on côtoie des naïfs — « voilà », dit-il.",
    "es": "¿Quién dijo que mañana llegaría el niño? ¡Qué vergüenza! Todos nacen con dignidad y razón.",
    "pl": "Zażółć gęślą jaźń. Litwo! Ojczyzno moja! ty jesteś jak zdrowie; ten tylko się dowie.",
    "ru": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "ja": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で。",
    "zh": "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。及秦灭之后，楚汉分争。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "en": "The captain’s hat “fell” into the sea — nobody said a word.",
}
ENCODINGS = """de cp1252 latin-1 cp850 utf-16 utf-16-be utf-32
fr cp1252 mac-roman utf-16-le utf-8-sig
es cp1252
pl cp1250 iso8859-2
ru cp1251 koi8-r cp866 iso8859-5
el cp1253
ja shift_jis euc-jp
zh gb18030
ko euc-kr
en cp1252 mac-roman"""


@pytest.mark.parametrize("case", [f"{a.split()[0]} {b}" for a in ENCODINGS.splitlines() for b in a.split()[1:]])
def test_an_encoding_that_is_sure_is_read(case):
    language, encoding = case.split()
    text = "It was a day like others, and nobody knew why.\n" * 50 + f"{SAID[language]}\n" * 20
    assert document_of(text.encode(encoding), "a.txt").text == text


def test_old_books_are_read_rightly_or_refused():
    """Passages with lines that have accents, in encodings that such files are in."""
    if not (books := sorted(SHARED.glob("pg19-mini/*/*.txt"))):
        pytest.skip("../shared/data has no books")
    texts, drawn, said = [book.read_text("utf-8") for book in books], random.Random(17_204), Counter()
    accents = [line for text in texts for line in re.findall("^.*[à-ÿ].*$", text, re.MULTILINE)]
    for encoding in ("cp1252", "latin-1", "cp850", "mac-roman"):
        for _ in range(50):
            text = drawn.choice(texts)
            start = drawn.randrange(len(text) - 4000)
            passage = "\n".join([text[start : start + 2000], *drawn.sample(accents, drawn.choice([3, 10, 30]))])
            content = passage.encode(encoding, "ignore")
            try:
                said[document_of(content, "a").text == content.decode(encoding)] += 1
            except UserError:
                said["refused"] += 1
    assert said[True] > 160
    assert said[False] < 3


def test_one_that_is_not_sure_is_refused_and_html_says_its_own():
    dish = "It was 20° in the shade.\n" + "It was a day like others, and nobody knew why.\n" * 50
    for encoding in ("mac-roman", "cp850"):
        with pytest.raises(
            EncodingError, match="^a: is not text in UTF-8 .byte 9., perhaps in .* or .*: conv"
        ) as raised:
            document_of(dish.encode(encoding), "a")
        assert len({sample for _, sample in raised.value.guesses}) == len(raised.value.guesses) > 1
        assert all("It was 20" in sample and len(sample) < 100 for _, sample in raised.value.guesses)
        right = next(name for name, sample in raised.value.guesses if "It was 20° in" in sample)
        assert document_of(dish.encode(encoding), "a", right).text == dish
        page = f'<html><head><meta charset="{encoding}"></head><body>{dish}</body></html>'.encode(encoding)
        assert "20° in" in document_of(page, "a").text


def test_an_encoding_that_is_named_is_taken_or_refused():
    page = "<html><meta charset=utf-8><body>Größe".encode("cp1252")
    assert document_of(page, "a.html", "windows-1252").text.strip() == "Größe"
    for encoding, said in (
        ("no-such", "encoding=no-such: there is none"),
        ("ascii", None),
        ("utf-8", "is not text in"),
    ):
        if said is None:
            assert document_of(page, "a.txt", encoding)  # as browsers read this name
        else:
            with pytest.raises(UserError, match=f"^a: {said}"):
                document_of(page, "a", encoding)


def without(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("kind", ["pdf", "epub", "docx", "html", "txt"])
def test_a_missing_package_is_named_and_utf_8_needs_none(kind, monkeypatch):
    for package in ("pypdfium2", "lxml", "chardet"):
        without(package, monkeypatch)
    with pytest.raises(UserError, match=r"^a: .*pip install 'landmark\[documents\]'"):
        document_of(files.EACH[kind], "a")
    assert document_of(files.EACH["md"], "a").text == files.EACH["md"].decode()


BOMB = b"<p>" + b"a" * (1 << 27)
ENTITIES = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
CIPHER = '<encryption><EncryptedData><CipherReference URI="OEBPS/text/c.xhtml"/></EncryptedData></encryption>'
REFUSED = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\t", "has no text"),
    "scanned": (files.pdf("▣", "▣", ""), "has no text on its 3 pages, it is scanned: run ocrmypdf on it first"),
    "stamped": (files.pdf(*["▣Bates 000"] * 5), "has hardly any text on its 5 pages, it is scanned: run ocrmypdf"),
    "blank pages": (files.pdf("", ""), "has no text on its 2 pages$"),
    "without pages": (files.pdf(), "has no pages"),
    "locked": (files.pdf("A heron.", trailer=files.LOCKED), "is encrypted: save a copy that needs no password"),
    "drm": (files.epub(**{"META-INF__encryption_xml": CIPHER}), r"is encrypted \(DRM\)"),
    "locked zip": (files.epub().replace(b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"), "is encrypted"),
    "zip": (files.zipped({"a.txt": "text"}), r"is an archive \(zip\): unpack it first"),
    "xlsx": (files.zipped({"xl/workbook.xml": ""}), r"is an Excel table \(.xlsx\)"),
    "odt": (files.zipped({"mimetype": "application/vnd.oasis.opendocument.text"}), "is an OpenDocument file"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0", "is a picture"),
    "jpeg": (b"\xff\xd8\xff\xe0\0\x10JFIF", "is a picture"),
    "webp": (b"RIFF\0\0\0\0WEBP", "is a picture"),
    "heic": (b"\0\0\0\x18ftypheic", "is a picture"),
    "mp3": (b"ID3\3\0\0\0", "is sound or a film"),
    "mp4": (b"\0\0\0\x18ftypisom", "is sound or a film"),
    "gzip": (b"\x1f\x8b\x08\0", "is an archive: unpack it first"),
    "tar": (b"a.txt" + b"\0" * 252 + b"ustar", "is an archive"),
    "doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", r"is an old Office file \(.doc, .xls, …\)"),
    "rtf": (b"{\\rtf1 a}", "is RTF: save it as DOCX or PDF"),
    "mobi": (b"a" * 60 + b"BOOKMOBI", r"is a Kindle book \(MOBI\)"),
    "noise": (random.Random(40193).randbytes(5000), "is not text in UTF-8 .*, nor in another encoding that is known"),
    "zeros": (b"\0" * 5000, "is not text in UTF-8 .*, nor in another encoding"),
    "a.pdf": (b"not one", r"is no PDF inside: damaged, or under a wrong name"),
    "half a PDF": (files.pdf("a")[:60], "is damaged"),
    "no chapter": (files.epub(OEBPS__text__c_xhtml=None), "is damaged, OEBPS/text/c.xhtml is missing"),
    "bomb": (files.epub(OEBPS__text__c_xhtml=BOMB), "unpacks to more than 64 MiB"),
    "docx bomb": (files.docx(word__document_xml=BOMB), "unpacks to more than 64 MiB"),
    "entities": (files.epub(OEBPS__book_opf=ENTITIES + files.OPF), "declares entities in OEBPS/book.opf"),
    "in UTF-16": (files.docx(word__document_xml=ENTITIES.encode("utf-16")), "declares entities in word/"),
    "deep": (b"<html>" + b"<b>" * 200_000 + b"</i>" * 200_000, "has more than 500 elements in one another"),
    "pages": (files.pdf("").replace(b"/Count 1", b"/Count 999999999"), "has no text on its|is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_its_name(name):
    content, said = REFUSED[name]
    with pytest.raises(UserError, match=f"^{name}: {said}") as refused:
        document_of(content, name)
    assert "\n" not in str(refused.value)


def test_a_pdf_that_ends_its_process_is_refused(monkeypatch, tmp_path_factory):
    program = tmp_path_factory.mktemp("program") / "pdf.py"
    program.write_text("import os\nos.abort()\n")
    monkeypatch.setattr(pdf_program, "__file__", str(program))
    with pytest.raises(UserError, match="^a: is damaged, or too large: PDFium cannot read it"):
        document_of(files.EACH["pdf"], "a")


def test_the_name_of_another_file_or_place_in_a_file_is_not_followed(monkeypatch):
    secret = "/etc/passwd"
    page = (
        f'<!DOCTYPE html SYSTEM "file://{secret}"><html><body><iframe src="{secret}"></iframe><object data="{secret}">'
    )
    page += f'</object><img src="http://localhost/x"><p>a</p><a href="{secret}">b</a></body></html>'
    assert document_of(page.encode(), "a.html").text == "a\n\nb"
    opf = f'<!DOCTYPE package SYSTEM "file://{secret}">' + files.OPF.replace("text/c.xhtml", f"../../../../..{secret}")
    with pytest.raises(UserError, match="is missing"):
        document_of(files.epub(OEBPS__book_opf=opf), "a")


def damaged(content, drawn):
    """Cut, with bytes flipped, with a piece gone, or with a piece of itself elsewhere."""
    content, way = bytearray(content), drawn.randrange(4)
    start, stop = sorted(drawn.randrange(len(content) + 1) for _ in range(2))
    if way == 0:
        return bytes(content[:stop])
    for _ in range(drawn.choice([1, 3, 30]) * (way == 1)):
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    if way == 2:
        del content[start : min(stop, start + 40)]
    if way == 3:
        content[start : start + 20] = content[stop : stop + 20]
    return bytes(content)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "seed"), [("epub", 71_503), ("docx", 28_661), ("html", 94_207), ("txt", 5_519), ("md", 63_841)]
)
def test_damaged_files_are_read_or_refused_in_one_line(kind, seed):
    """Also under the suffixes of others, and where the damage is within a file that is then zipped again."""
    drawn, read = random.Random(seed), 0
    for number in range(400):
        content = damaged(files.EACH[kind], drawn)
        if kind in ("epub", "docx") and number % 2:
            name, inner = drawn.choice([*INNER[kind].items()])
            content = getattr(files, kind)(**{name: damaged(inner.encode(), drawn)})
        said = ""
        try:
            document = document_of(content, f"a.{drawn.choice(list(files.EACH))}")
            read += bool(document.place(len(document.text) // 2))
            assert all(0 <= start <= len(document.text) for start, _ in document.places)
        except UserError as error:
            said = str(error)
        assert "\n" not in said
    assert read > 40


INNER = {
    "epub": {"META-INF__container_xml": files.CONTAINER, "OEBPS__book_opf": files.OPF, "OEBPS__nav_xhtml": files.NAV}
    | {"OEBPS__text__c_xhtml": files.PARTS[1], "OEBPS__toc_ncx": files.NCX},
    "docx": {"word__document_xml": files.WORD, "word__styles_xml": files.STYLES, "word__footnotes_xml": files.NOTES},
}
FUZZ = """
import random, sys
from landmark.documents import pdf
from tests.experiment.data.conftest import SHARED
from tests.documents import files
from tests.documents.test_reading import damaged
drawn, read = random.Random(80_347), 0
for number in range(400):
    said = pdf._read(damaged(files.EACH["pdf"], drawn), 1 << 26)
    assert isinstance(said, str) and "\\n" not in said or all(isinstance(page.text, str) for page in said)
    read += isinstance(said, list)
print(read)
"""


@pytest.mark.timeout(240)
def test_damaged_pdfs_are_read_or_refused_and_none_ends_the_program():
    done = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


def test_several_are_one_text_begun_by_their_names_and_a_memory_says_where_each_begins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    (folder / "a.txt").write_text("One.\nTwo.\n")
    (folder / "b.pdf").write_bytes(files.EACH["pdf"])
    single = read_document(folder / "a.txt")
    assert concatenated([single]) == single == Document("a.txt", "One.\nTwo.\n")
    document = concatenated([single, read_document(folder / "b.pdf")])
    assert document.text == "a.txt\n\nOne.\nTwo.\n\nb.pdf\n\nA heron stands.\n\nIt waits.\n\n"
    said = {word: document.place(document.text.index(word)) for word in ("a.txt", "Two", "b.pdf", "stands", "waits")}
    assert said == {
        "a.txt": "a.txt",
        "Two": "a.txt, line 2",
        "b.pdf": "b.pdf",
        "stands": "b.pdf, page 1",
        "waits": "b.pdf, page 2",
    }
    for name, content in beside_memory(document, None).items():
        (folder / name).write_bytes(content)
    assert saved_document(folder, f"{document.text} and a chat") == document
    assert beside_memory(single, folder) == beside_memory(document, None), "it went on with a memory"
    assert saved_document(folder / "none", "") is None


def test_a_folder_of_documents_is_a_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    for kind in ("pdf", "epub", "docx", "html", "txt", "md"):
        (folder / f"a.{kind}").write_bytes(files.EACH[kind])
    (folder / "b.txt").write_bytes(b"\r\nUnchanged.\r\n")
    source = open_source("documents", folder)
    found = dict.fromkeys((f"a.{kind}" for kind in ("pdf", "epub", "docx", "html", "txt", "md")), "") | {"b.txt": ""}
    for each in (each for split in ("train", "validation", "test") for each in source.documents(split)):
        found[each.name] += each.text
    assert all(found.values())
    assert found["b.txt"] == "\r\nUnchanged.\r\n"
    assert found["a.txt"] == files.EACH["txt"].decode("cp1252")
    assert found["a.pdf"] == "A heron stands.\n\nIt waits.\n\n"
