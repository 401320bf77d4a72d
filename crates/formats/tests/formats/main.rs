//! Every format: decoders against an independent implementation, encoders by their error, layouts
//! by round trips, every kernel at every level against the rules written out, and coded matrices.

mod decoders;
mod encoders;
mod kernels;
mod rans;
mod support;
