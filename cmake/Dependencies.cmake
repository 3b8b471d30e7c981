# What the build uses. Required: LibTorch, fmt, spdlog, nlohmann-json, CLI11. Optional: everything else; a missing one
# drops only what needs it, with a message.

# The folders of PENSTOCK_EXTRA_INCLUDE come last, so that they only fill gaps.
foreach(folder IN LISTS PENSTOCK_EXTRA_INCLUDE)
  if(NOT IS_DIRECTORY ${folder})
    message(FATAL_ERROR "PENSTOCK_EXTRA_INCLUDE names ${folder}, which is not a folder; give existing folders or unset it")
  endif()
  target_compile_options(penstock_flags INTERFACE -idirafter ${folder})
endforeach()

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
if(PENSTOCK_TESTS)
  find_package(GTest)
endif()

include(TorchTarget)
message(STATUS "LibTorch: ${Torch_VERSION} in ${Torch_DIR}")

# Header search with the extra folders as a last resort. Sets PENSTOCK_HAVE_<name>.
function(penstock_find_header name header consequence)
  find_path(PENSTOCK_${name}_INCLUDE ${header} HINTS ${PENSTOCK_EXTRA_INCLUDE})
  if(PENSTOCK_${name}_INCLUDE)
    set(PENSTOCK_HAVE_${name} ON PARENT_SCOPE)
  else()
    set(PENSTOCK_HAVE_${name} OFF PARENT_SCOPE)
    message(STATUS "${header} not found: ${consequence}")
  endif()
endfunction()

penstock_find_header(GLOO gloo/context.h "no Gloo backend; CPU tensors cannot be communicated between processes")
penstock_find_header(UCX ucp/api/ucp.h "no UCX transport")
penstock_find_header(RAPIDCHECK rapidcheck.h "property tests are left out")
penstock_find_header(XXHASH xxhash.h "no xxHash")
penstock_find_header(TOML toml++/toml.h "no configuration files")
penstock_find_header(BOOST_GRAPH boost/graph/boykov_kolmogorov_max_flow.hpp "captured graphs are split by the default rule only")

if(PENSTOCK_HAVE_UCX)
  find_library(PENSTOCK_UCP_LIBRARY ucp)
  find_library(PENSTOCK_UCS_LIBRARY ucs)
  if(NOT PENSTOCK_UCP_LIBRARY OR NOT PENSTOCK_UCS_LIBRARY)
    set(PENSTOCK_HAVE_UCX OFF)
    message(STATUS "libucp not found: no UCX transport")
  endif()
endif()

# NCCL comes inside LibTorch; its header tells whether this LibTorch was built with CUDA.
set(PENSTOCK_HAVE_CUDA OFF)
if(TORCH_CUDA_LIBRARIES OR TARGET torch_cuda)
  set(PENSTOCK_HAVE_CUDA ON)
endif()
if(PENSTOCK_CUDA AND NOT PENSTOCK_HAVE_CUDA)
  message(FATAL_ERROR "PENSTOCK_CUDA is on, but the LibTorch in ${Torch_DIR} has no CUDA; give one by -DTorch_DIR=... or use another preset")
endif()
