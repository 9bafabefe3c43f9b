"""Files as people have them (PDF, EPUB, DOCX, HTML, Markdown, plain text) become texts with places."""

from landmark.documents.document import (
    Document,
    as_files,
    beside_memory,
    documents_read,
    joined,
    placed,
    saved_document,
    saved_lacks,
)
from landmark.documents.reading import EncodingError, TextlessError, document_of, read_document

__all__ = [
    "Document",
    "EncodingError",
    "TextlessError",
    "as_files",
    "beside_memory",
    "document_of",
    "documents_read",
    "joined",
    "placed",
    "read_document",
    "saved_document",
    "saved_lacks",
]
