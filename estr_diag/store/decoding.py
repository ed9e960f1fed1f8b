"""Texts of tokens from their ids, by a tokenizer of the user's."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from estr_diag.errors import MissingColumnError, UsageError
from estr_diag.store.database import Store


def decode(store: Store, tokenizer: Path) -> None:
    """Let the session see a text for every token that has an id and none; the store itself is not changed.

    Parameters
    ----------
    tokenizer
        A ``tokenizer.json`` of the `tokenizers` library.

    Raises
    ------
    UsageError
        The library is not installed, or the file cannot be read.
    MissingColumnError
        The log has no token ids.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("texts from ids need the tokenizers library: pip install 'estr-diag[text]'") from None
    if not tokenizer.is_file():
        raise UsageError(f"{tokenizer}: no such file; expected the tokenizer.json of the model")
    if "token_id" not in store.present():
        raise MissingColumnError("texts of tokens", ["token_id"], "dump the ids of the sampled tokens")
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises plain exceptions
        raise UsageError(f"{tokenizer}: not a tokenizer.json ({error})") from None
    ids = [row["token_id"] for row in store.rows("select distinct token_id from tokens where token_id is not null")]
    known = loaded.get_vocab_size()
    texts = [loaded.decode([i], skip_special_tokens=False) if 0 <= i < known else None for i in ids]
    table = pa.table({"token_id": pa.array(ids, pa.int64()), "decoded": pa.array(texts, pa.string())})
    store.connection.register("decoded_ids", table)
    store.connection.execute("create or replace temp table decoded_texts as select * from decoded_ids")
    store.connection.unregister("decoded_ids")
    # A view of the session in front of the table: what reads texts finds them, whoever asks.
    source = store.rows(
        "select table_catalog as c, table_schema as s from information_schema.tables where table_name = 'tokens' limit 1"
    )[0]
    store.connection.execute(
        f"""create or replace temp view tokens as
select t.* replace (coalesce(t.token_text, d.decoded) as token_text)
from "{source["c"]}"."{source["s"]}".tokens t left join decoded_texts d using (token_id)"""
    )
