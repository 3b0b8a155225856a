//! Tests of the schema.
