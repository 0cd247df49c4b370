"""HTML: templates, formats, Markdown, chart images and the documentation."""
