"""Sphinx's settings; `make docs` passes this file's folder with -c."""

import os

import cebm

project = "cebm"
author = "the authors of cebm"
release = version = cebm.__version__

extensions = ["myst_parser", "sphinx.ext.mathjax", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
nitpicky = True
# Signatures name types of torch, numpy and the standard library, whose pages are not here. A name that a page refers
# to by hand is a py:obj, and has to exist.
nitpick_ignore_regex = [("py:class", ".*")]
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
toc_object_entries = False

html_theme = "furo"
html_title = "cebm"
# Paths here are relative to this folder.
html_static_path = [os.environ.get("CEBM_SITE_STATIC", "../../build/docs/source/_static")]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
# A summary is fetched from its page, which browsers refuse for a site that is opened as files.
html_show_search_summary = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True, "footer_icons": []}
mathjax_path = "mathjax/tex-svg.js"
# Without this MathJax would fetch its menu's parts and its screen-reader speech when they are first used.
mathjax3_config = {
    "options": {"enableMenu": False, "enableAssistiveMml": True},
    "loader": {"load": []},
}
