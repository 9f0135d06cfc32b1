// Functions that are compiled for the processor and for a GPU.
#pragma once

#ifdef __CUDACC__
#define PYDDL_BOTH __host__ __device__
#else
#define PYDDL_BOTH
#endif
