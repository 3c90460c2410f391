"""The errors a caller of tp_flower can act on."""


class TPFlowerError(Exception):
    """Base of every error that tp_flower raises on purpose."""


class SettingsError(TPFlowerError):
    """A setting of the experiment is unknown, ill-typed or out of range."""


class QueryError(TPFlowerError):
    """The SQL query cannot be parsed, bound or pushed down."""


class SchemaError(TPFlowerError):
    """The tables that the sites host do not fit the query or each other."""


class SourceError(TPFlowerError):
    """A shard's source cannot be read or holds values that cannot be used."""


class MappingError(TPFlowerError):
    """The join of the keys cannot be built or has no rows."""


class ReplyError(TPFlowerError):
    """A site's reply is missing, malformed or of the wrong shape."""


class SiteError(TPFlowerError):
    """A site reported that it could not carry out a request."""


class LedgerError(SiteError):
    """A site's privacy ledger is damaged or cannot be written; nothing is released."""


class BudgetError(SiteError):
    """A release would spend more than a site's privacy budget."""


class PolicyError(SiteError):
    """A request asks for what the policy of a site's table does not allow."""


class ModelError(TPFlowerError):
    """A saved model is unknown, damaged, of another version, or badly named."""
