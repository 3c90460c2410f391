"""The training methods that a run can name, each in a room of its own."""

from tp_flower.methods.admm import ADMM
from tp_flower.methods.boost import BOOST
from tp_flower.methods.cg import CG
from tp_flower.methods.coreset import KMEANS, RIDGE
from tp_flower.methods.method import register
from tp_flower.methods.moments import MOMENTS
from tp_flower.methods.personalised import PERSONALISED
from tp_flower.methods.sgd import GD, SGD

register(ADMM, CG, SGD, GD, BOOST, MOMENTS, RIDGE, KMEANS, PERSONALISED)
