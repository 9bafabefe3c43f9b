"""Files as people have them (PDF, EPUB, DOCX, HTML, Markdown, plain text) become texts with places."""

from landmark.documents.document import (
    Document,
    as_files,
    beside_memory,
    concatenated,
    documents_read,
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
    "concatenated",
    "document_of",
    "documents_read",
    "placed",
    "read_document",
    "saved_document",
    "saved_lacks",
]
