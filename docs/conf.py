"""Settings of the documentation site; `make docs` builds it into build/site.

The pages are the Markdown files of this folder, which are as readable on GitHub. What the site adds is in `_site.py`.
"""

import logging
import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
# The package of this checkout, and the extension beside this file.
sys.path[:0] = [str(DOCS.parent), str(DOCS)]
# A build on a machine with GPUs gives the same pages as one without.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Libraries that are imported for their docstrings report what they load, unless somebody listens already.
logging.getLogger().addHandler(logging.NullHandler())

from dynamicemb.version import __version__  # noqa: E402 (found by the path above)

project = "dynamicemb"
author = "the dynamicemb authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "_site"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_*"]
language = "en"

# Markdown. Headings of all pages have the anchors that GitHub gives them.
myst_heading_anchors = 4
myst_links_external_new_tab = False
# Blocks without a language are text, but those of docstrings (`_site.py`).
highlight_language = "text"

# Docstrings.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autoclass_content = "both"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Members", "params_style")]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# Single backticks in docstrings are code, too.
default_role = "code"

# References that lead nowhere are errors, but for these.
nitpicky = True
nitpick_ignore_regex = [
    # Internal: types of attributes that scripts for NVIDIA's package ask for.
    (r"py:class", r"dynamicemb\.(table\.group\.TableGroup|optimizer\.OptimizerKind)"),
    # Other libraries: a build without a network cannot ask for the addresses of their pages.
    (r"py:.*", r"(torch|torchrec|fbgemm_gpu|numpy|collections|enum|abc|os|typing|types)(\..*)?"),
]

html_theme = "furo"
html_title = f"dynamicemb {release}"
html_static_path: list[str] = []
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
