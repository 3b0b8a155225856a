//! Tests of the rooms.
