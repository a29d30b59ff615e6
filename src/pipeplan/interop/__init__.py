"""Files of other programs: one foreign format a file, text in and out, no framework needed."""
