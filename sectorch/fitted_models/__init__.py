"""Fitted models of tables as modules: trees, forests, boosted trees, linear models, nets and pipelines.

See docs/fitted-models.md.
"""

from .convert import module as module
from .readers import read_lightgbm as read_lightgbm
from .readers import read_xgboost as read_xgboost
from .schema import Schema as Schema
from .trees import Tree as Tree
from .trees import Trees as Trees

__all__ = ["Schema", "Tree", "Trees", "module", "read_lightgbm", "read_xgboost"]
