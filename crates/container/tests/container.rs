//! Integration tests of the crate, one binary.

#[path = "container/common.rs"]
mod common;
#[path = "container/model.rs"]
mod model;
