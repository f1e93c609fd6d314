"""What the notebooks import. Light: matplotlib, ipywidgets and torch load when a function needs them."""

from __future__ import annotations

from minillm.course import figures
from minillm.course.agreement import agree
from minillm.course.batteries import prove_cache, prove_pool, prove_sampler, prove_scheduler, prove_tokenizer
from minillm.course.checking import check
from minillm.course.display import canvas, show
from minillm.course.quizzes import quiz
from minillm.course.session import recorded, start
from minillm.course.terms import glossary
from minillm.course.widgets import explore, in_background

__all__ = ["agree", "canvas", "check", "explore", "figures", "glossary", "in_background", "prove_cache",
           "prove_pool", "prove_sampler", "prove_scheduler", "prove_tokenizer", "quiz", "recorded", "show", "start"]
