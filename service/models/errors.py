"""What can go wrong on the way from a model's name to a folder. Messages are for the person who typed the name."""


class ModelError(Exception):
    """A model can't be had or used; the message says why and what to do."""


class UnknownModel(ModelError):
    """The name is neither known, nor a folder, nor a hub id."""


class BadModelFolder(ModelError):
    """A model folder lacks a file, or a file in it is damaged."""


class TermsNotAccepted(ModelError):
    """The model comes under terms that the user has not accepted yet."""


class DownloadFailed(ModelError):
    """A file could not be fetched, or is not the file that was recorded."""


class ConversionFailed(ModelError):
    """A GGUF file holds something that the converter does not know."""


class NotEnoughSpace(ModelError):
    """The cache directory's disk has too little room for the work."""
