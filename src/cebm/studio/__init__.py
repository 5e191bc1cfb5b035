"""The studio: look into a conditional energy in the browser. `cebm studio RUN` opens it; docs/studio.md has all of it.

One module per panel computes data and needs no browser: `landscape`, `search`, `observation`, `comparison`, `training`.
`desk` answers the page's questions with them, and `server` is the only one that knows HTTP.
"""

from cebm.studio.comparison import Comparison as Comparison
from cebm.studio.comparison import compare as compare
from cebm.studio.comparison import log_densities as log_densities
from cebm.studio.controls import Control as Control
from cebm.studio.controls import controls_of as controls_of
from cebm.studio.controls import with_values as with_values
from cebm.studio.desk import Desk as Desk
from cebm.studio.landscape import Landscape as Landscape
from cebm.studio.landscape import landscape as landscape
from cebm.studio.leaf import view_page as view_page
from cebm.studio.leaf import write_view as write_view
from cebm.studio.observation import columns_of as columns_of
from cebm.studio.observation import moved as moved
from cebm.studio.observation import principal as principal
from cebm.studio.observation import rolled as rolled
from cebm.studio.observation import window_of as window_of
from cebm.studio.search import Moves as Moves
from cebm.studio.search import formulations as formulations
from cebm.studio.search import search as search
from cebm.studio.subject import Subject as Subject
from cebm.studio.subject import open_subject as open_subject
from cebm.studio.training import Progress as Progress
