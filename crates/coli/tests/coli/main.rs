//! The program as a user runs it.

mod bench;
mod commands;
mod convert;
mod hostile;
mod memory;
mod route;
mod support;
