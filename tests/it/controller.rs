//! Tests of the controller.
