# Flags of every target of this project: warnings, sanitizers, ccache.

find_program(PENSTOCK_CCACHE ccache)
if(PENSTOCK_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers carry time stamps; without this ccache would miss on every clean build.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${PENSTOCK_CCACHE})
  message(STATUS "ccache: ${PENSTOCK_CCACHE}")
endif()

# A faster linker, where there is one: dozens of programs are linked against LibTorch.
find_program(PENSTOCK_MOLD mold)
if(PENSTOCK_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
  add_link_options(-fuse-ld=mold)
endif()

add_library(penstock_flags INTERFACE)
target_compile_options(penstock_flags INTERFACE -Wall -Wextra -Wpedantic -Wno-unused-parameter
  -Wno-missing-field-initializers)  # designated initializers name what matters and leave the rest at its default
if(PENSTOCK_WERROR)
  target_compile_options(penstock_flags INTERFACE -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # Newer g++ see overruns in the standard library's own inlined copies that are not there.
  target_compile_options(penstock_flags INTERFACE -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread
                         -Wno-maybe-uninitialized -Wno-dangling-reference)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Units are large: collecting the compiler's garbage more rarely saves a twentieth of the time for a tenth more memory.
  target_compile_options(penstock_flags INTERFACE --param=ggc-min-heapsize=3000000)
  # -fpch-preprocess lets ccache see through the shared precompiled header.
  target_compile_options(penstock_flags INTERFACE -fpch-preprocess)
endif()
if(PENSTOCK_SANITIZE)
  add_compile_options(-fsanitize=${PENSTOCK_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${PENSTOCK_SANITIZE})
  if(PENSTOCK_SANITIZE MATCHES undefined)
    add_compile_options(-fno-sanitize=vptr)  # LibTorch is built without type information for some of its classes
    add_compile_options(-fno-sanitize-recover=all)
  endif()
endif()
