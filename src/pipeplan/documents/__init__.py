"""Files and text: the three formats, their syntax, and words for what is wrong with them."""
