//! The program as a user runs it.

mod commands;
mod convert;
mod hostile;
mod memory;
mod support;
