//! The engine against its references and against itself.

mod oracle;
mod support;
