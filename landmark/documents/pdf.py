"""PDF by PDFium, in a process of its own, whose program this file is. PDFium is C++ that meets a stranger's file: a
crash, a loop or a bomb ends that process alone. And PDFium serves one thread at a time.
"""

import json
import subprocess
import sys

SECONDS, BYTES = 120, 4 << 30  # most that a file may take of the processor, and of memory
PASSWORD = 4  # PDFium's number for a file that needs one


def pages(content: bytes, most: int) -> list[str]:
    """The text of each page. most: characters of all. Raises ValueError that says what is wrong with the file."""
    command = [sys.executable, "-P", __file__, str(most)]  # -P: modules beside this one are not found
    done = subprocess.run(command, input=content, capture_output=True)
    if done.returncode:
        raise ValueError("is damaged, or too large: PDFium cannot read it")
    said = json.loads(done.stdout)
    if isinstance(said, str):
        raise ValueError(said)
    return said


def _read(content: bytes, most: int) -> list[str] | str:
    """The pages, or what is wrong."""
    import pypdfium2

    try:
        file = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        is_locked = getattr(error, "err_code", None) == PASSWORD
        return "is encrypted: save a copy that needs no password" if is_locked else "is damaged: PDFium cannot read it"
    found, characters = list[str](), 0
    for number in range(len(file)):
        try:
            page = file[number]
            text = page.get_textpage().get_text_range()
        except pypdfium2.PdfiumError:
            return f"is damaged: PDFium cannot read page {number + 1}"
        page.close()
        found.append(text)
        characters += len(text) + 1
        if characters > most:
            return f"has more than {most:,} characters"
    return found


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(_read(sys.stdin.buffer.read(), int(sys.argv[1]))))
