# penstock_folder(<name> SOURCES <files> [TORCH] [LINKS <folders or targets>] [PRIVATE <targets>])
#
# One static library per folder of penstock/, named penstock_<name>, exported as penstock::<name>. The links are the
# arrows of the architecture: a folder that includes what it does not link fails to link.
# TORCH: the folder knows LibTorch and shares the one precompiled header.

set(PENSTOCK_FOLDERS "" CACHE INTERNAL "")

# Most of the time of a translation unit goes into headers. Several files as one unit build the library in a third of the time; a change of
# one file then compiles its neighbours again.
option(PENSTOCK_UNITY "Compile the files of a folder several at a time; OFF is better for working on them" ON)

function(penstock_use_unity target)
  if(PENSTOCK_UNITY)
    # In a unit of many files each of them counts as included, and classes with members of local types would be warned of.
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

function(penstock_folder name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;LINKS;PRIVATE" ${ARGN})
  set(target penstock_${name})
  add_library(${target} STATIC ${arg_SOURCES})
  add_library(penstock::${name} ALIAS ${target})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                              $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated>
                                              $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:penstock_flags>)
  foreach(link IN LISTS arg_LINKS)
    if(TARGET penstock_${link})
      target_link_libraries(${target} PUBLIC penstock_${link})
    else()
      target_link_libraries(${target} PUBLIC ${link})
    endif()
  endforeach()
  target_link_libraries(${target} PRIVATE ${arg_PRIVATE})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  penstock_use_unity(${target})
  if(arg_TORCH)
    target_link_libraries(${target} PUBLIC $<BUILD_INTERFACE:penstock_torch> $<INSTALL_INTERFACE:penstock::libtorch>)
    penstock_use_torch_library_header(${target})
  endif()
  set(PENSTOCK_FOLDERS ${PENSTOCK_FOLDERS} ${target} CACHE INTERNAL "")
endfunction()

# Precompiled Torch headers, each built once. A translation unit costs 13 s without; what it costs with one depends on how many
# templates the header leaves to be instantiated at the end of every unit: 3 s with what the library needs (tensors, dispatcher,
# autograd functions), 7 s with all of torch/torch.h (modules, optimizers), which programs and tests use. Tests are compiled
# without optimization, which halves what they cost; the library they test is not.
function(penstock_use_torch_header target)
  penstock_precompiled(${target} penstock_torch_header <torch/torch.h> <torch/library.h>
                       <torch/csrc/distributed/c10d/Store.hpp> <fmt/format.h> <spdlog/spdlog.h>)
endfunction()

function(penstock_use_torch_test_header target)
  penstock_precompiled(${target} penstock_torch_test_header <torch/torch.h> <torch/library.h>
                       <torch/csrc/distributed/c10d/Store.hpp> <fmt/format.h> <spdlog/spdlog.h> <gtest/gtest.h>)
  foreach(user IN ITEMS penstock_torch_test_header ${target})
    target_link_libraries(${user} PRIVATE GTest::gtest)  # g++ refuses a precompiled header made under other definitions
  endforeach()
  set_property(TARGET penstock_torch_test_header APPEND PROPERTY COMPILE_OPTIONS -O0)
  target_compile_options(${target} PRIVATE -O0)
endfunction()

function(penstock_use_torch_library_header target)
  penstock_precompiled(${target} penstock_torch_library_header <ATen/ATen.h> <torch/library.h> <torch/csrc/autograd/custom_function.h>
                       <torch/csrc/distributed/c10d/Store.hpp> <fmt/format.h> <spdlog/spdlog.h>)
endfunction()

function(penstock_precompiled target header)
  if(NOT TARGET ${header})
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/${header}.cpp CONTENT "// Carries a precompiled header.\n")  # only written when it differs
    add_library(${header} OBJECT ${PROJECT_BINARY_DIR}/generated/${header}.cpp)
    target_link_libraries(${header} PRIVATE penstock_flags penstock_torch fmt::fmt spdlog::spdlog)
    target_precompile_headers(${header} PRIVATE ${ARGN})
  endif()
  # CMake compiles executables with -fPIE and libraries with -fPIC, and g++ refuses a precompiled header made under the
  # other flag; so everything that shares it is compiled as for a library.
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_link_libraries(${target} PRIVATE fmt::fmt spdlog::spdlog)
  target_precompile_headers(${target} REUSE_FROM ${header})
endfunction()
