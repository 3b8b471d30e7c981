# cmake --install: a relocatable package. find_package(penstock) gives penstock::penstock, the one library, and its public headers.

# All rooms but the command's in one archive: users link this and nothing else.
set(objects)
foreach(room IN LISTS PENSTOCK_ROOMS)
  if(NOT room MATCHES "^penstock_cli")
    list(APPEND objects $<TARGET_OBJECTS:${room}>)
  endif()
endforeach()
add_library(penstock_library STATIC ${objects})
add_library(penstock::penstock ALIAS penstock_library)
set_target_properties(penstock_library PROPERTIES OUTPUT_NAME penstock EXPORT_NAME penstock LINKER_LANGUAGE CXX)
target_compile_features(penstock_library PUBLIC cxx_std_20)
target_include_directories(penstock_library PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                   $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(penstock_library
  PUBLIC fmt::fmt spdlog::spdlog Threads::Threads $<BUILD_INTERFACE:penstock_libtorch> $<INSTALL_INTERFACE:penstock::libtorch>
  PRIVATE ${PENSTOCK_UCP_LIBRARY} ${PENSTOCK_UCS_LIBRARY} ${CMAKE_DL_LIBS})
if(PENSTOCK_GLOO_LIBRARY)
  target_link_libraries(penstock_library PRIVATE ${PENSTOCK_GLOO_LIBRARY})
endif()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/penstock)
install(TARGETS penstock_library EXPORT penstock_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT penstock_targets NAMESPACE penstock:: DESTINATION ${package_folder})
install(TARGETS penstock RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS penstock-tensor RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/penstock)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/penstock DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/penstockConfig.cmake.in ${PROJECT_BINARY_DIR}/penstockConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/penstockConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/penstockConfig.cmake ${PROJECT_BINARY_DIR}/penstockConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/TorchTarget.cmake
        DESTINATION ${package_folder})

# The manual page and the completion of the command.
install(FILES ${PROJECT_SOURCE_DIR}/packaging/penstock.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${PROJECT_SOURCE_DIR}/packaging/penstock.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME penstock)

# cpack -G DEB: one package with the library, its headers, the command, its manual page and completion.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME penstock)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "The Penstock developers <penstock@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)  # the libraries that the command is linked with; needs dpkg-shlibdeps
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libtorch-dev, libfmt-dev, libspdlog-dev, nlohmann-json3-dev")  # for programs that link the library
set(CPACK_INCLUDE_TOPLEVEL_DIRECTORY OFF)
include(CPack)
