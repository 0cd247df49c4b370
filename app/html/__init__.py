"""HTML: templates, formats, Markdown, charts as pictures and the documentation."""
