# Finds LibTorch and offers it as the target `penstock_libtorch`.
# Looked for in this order: Torch_DIR, CMAKE_PREFIX_PATH, the package of an importable Python torch, the system.
# Also used by the installed package, so that a consumer finds LibTorch by the same rules.

if(NOT TARGET penstock_libtorch)
  if(NOT Torch_DIR AND NOT DEFINED ENV{Torch_DIR})
    find_package(Torch QUIET CONFIG NO_CMAKE_SYSTEM_PATH NO_SYSTEM_ENVIRONMENT_PATH NO_CMAKE_PACKAGE_REGISTRY)
    if(NOT Torch_FOUND)
      find_program(PENSTOCK_PYTHON NAMES python3 python)
      if(PENSTOCK_PYTHON)
        execute_process(
          COMMAND ${PENSTOCK_PYTHON} -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
          OUTPUT_VARIABLE _penstock_python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
        if(_penstock_python_torch AND EXISTS "${_penstock_python_torch}/share/cmake/Torch/TorchConfig.cmake")
          list(APPEND CMAKE_PREFIX_PATH "${_penstock_python_torch}")
        endif()
      endif()
    endif()
  endif()
  find_package(Torch REQUIRED CONFIG)

  add_library(penstock_libtorch INTERFACE)
  # SYSTEM: LibTorch's headers do not pass our warnings.
  target_include_directories(penstock_libtorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
  # Some builds of LibTorch ship the headers of their own fmt beside their own, without its library. Our fmt goes first.
  foreach(folder IN LISTS TORCH_INCLUDE_DIRS)
    if(EXISTS "${folder}/fmt/format.h" AND NOT folder STREQUAL "/usr/include")
      find_path(PENSTOCK_FMT_INCLUDE fmt/format.h NO_PACKAGE_ROOT_PATH NO_CMAKE_PATH)
      if(PENSTOCK_FMT_INCLUDE AND NOT PENSTOCK_FMT_INCLUDE STREQUAL folder)
        file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/penstock_fmt)
        file(CREATE_LINK ${PENSTOCK_FMT_INCLUDE}/fmt ${CMAKE_BINARY_DIR}/penstock_fmt/fmt SYMBOLIC)
        target_include_directories(penstock_libtorch INTERFACE ${CMAKE_BINARY_DIR}/penstock_fmt)  # -I: before every system folder
      endif()
    endif()
  endforeach()
  target_link_libraries(penstock_libtorch INTERFACE ${TORCH_LIBRARIES})
  string(REGEX MATCHALL "-D[^ ]+" _penstock_torch_definitions "${TORCH_CXX_FLAGS}")
  target_compile_options(penstock_libtorch INTERFACE ${_penstock_torch_definitions})
endif()
