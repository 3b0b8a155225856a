//! What tokens cost, in whole millionths of a US dollar.
