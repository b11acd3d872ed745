"""The papers behind the methods, as BibTeX."""

BIBTEX: dict[str, str] = {
    "mackay1992": """@article{mackay1992,
  author  = {MacKay, David J. C.},
  title   = {A Practical {Bayesian} Framework for Backpropagation Networks},
  journal = {Neural Computation},
  volume  = {4},
  number  = {3},
  pages   = {448--472},
  year    = {1992}
}""",
    "bishop2006": """@book{bishop2006,
  author    = {Bishop, Christopher M.},
  title     = {Pattern Recognition and Machine Learning},
  publisher = {Springer},
  year      = {2006}
}""",
    "graves2011": """@inproceedings{graves2011,
  author    = {Graves, Alex},
  title     = {Practical Variational Inference for Neural Networks},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2011}
}""",
    "blundell2015": """@inproceedings{blundell2015,
  author    = {Blundell, Charles and Cornebise, Julien and Kavukcuoglu, Koray and Wierstra, Daan},
  title     = {Weight Uncertainty in Neural Networks},
  booktitle = {International Conference on Machine Learning},
  year      = {2015}
}""",
    "kingma2015": """@inproceedings{kingma2015,
  author    = {Kingma, Diederik P. and Salimans, Tim and Welling, Max},
  title     = {Variational Dropout and the Local Reparameterization Trick},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2015}
}""",
}
